"""Write questions to a help centre as JSONL, to fine-tune a hybrid on.

    python examples/faq.py faq.jsonl

Each line is {"prompt", "answer", "answer_span"}. The prompt has 6 to 12 articles of two or three sentences each
(`--articles LOW HIGH` changes it), and a question about one of them. Its answer, of one to three words, stands in the
middle of the article; `answer_span` is where, and `--no-spans` leaves it out. The same options write the same lines.
What a hybrid learns from them: docs/your-data.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

PRODUCTS = (
    "lamp", "chair", "kettle", "printer", "tent", "bicycle", "clock", "heater", "camera", "radio", "scale", "mixer",
    "drill", "mirror", "fan", "backpack", "ladder", "desk", "mattress", "toaster",
)  # fmt: skip
PLANS = ("basic", "silver", "gold", "family", "student", "office", "travel", "garden", "winter", "summer")
LENGTHS = tuple(
    f"{n} {unit}" for n in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 20, 21, 30, 45, 60, 90) for unit in ("days", "weeks")
)
WAYS = (
    "by phone", "by letter", "in the app", "by email", "at the counter", "on the website", "in any shop",
    "with the driver",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "grey", "silver", "brown")
PARTS = (
    "battery", "cable", "cover", "filter", "handle", "lid", "screw", "wheel", "switch", "strap", "spare key", "manual",
)  # fmt: skip
PLACES = (
    "Hall Street", "Mill Road", "North Gate", "Old Market", "River Lane", "Park Avenue", "Station Square",
    "Church Hill",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PRICES = tuple(f"{n} euros" for n in (3, 4, 5, 6, 7, 8, 9, 12, 15, 18, 19, 24, 25, 29, 35, 49))
# Subjects, text of the article, question, answers: {x} is the subject, {v} the answer.
ARTICLES = (
    (PRODUCTS, "Returning a {x}. A {x} that does not suit you may come back to us within {v}, in its box and with the "
     "receipt. We pay the money back to the same card.", "How long do I have to return a {x}?", LENGTHS),
    (PRODUCTS, "Repairs of a {x}. If a {x} stops working, please tell us {v}, and we will send you a label. Do not "
     "open the case yourself.", "How do I report a broken {x}?", WAYS),
    (PRODUCTS, "Spare parts for a {x}. The only part of a {x} that we send without a fee is the {v}; for all others "
     "ask the shop.", "Which part of a {x} is free?", PARTS),
    (PRODUCTS, "Guarantee. Every {x} that was bought from us has a guarantee. It lasts {v} from the date on the "
     "invoice, and does not cover water.", "How long is the guarantee of a {x}?", LENGTHS),
    (PRODUCTS, "Status light. When the {x} is ready for use, the small light on its side turns {v}. Any other colour "
     "means that it needs care.", "Which colour shows that the {x} is ready?", COLOURS),
    (PRODUCTS, "Collecting your order. If you ordered a {x} and want to fetch it yourself, go to our store in {v} and "
     "bring the number of the order.", "Where can I collect a {x}?", PLACES),
    (PRODUCTS, "Delivery of a {x}. Since it is heavy, the {x} comes with our own van, which drives on {v} only. You "
     "get a message the evening before.", "On which day is a {x} delivered?", DAYS),
    (PLANS, "Ending the {x} plan. You may leave the {x} plan whenever you like. Tell us {v}; the plan then ends with "
     "the month.", "How do I end the {x} plan?", WAYS),
    (PLANS, "What the {x} plan costs. The price of the {x} plan is {v} a month, with all taxes, and there is no fee at "
     "the start.", "What does the {x} plan cost?", PRICES),
    (PLANS, "Trying the {x} plan. New members of the {x} plan can try it for {v} before they have to pay anything at "
     "all.", "How long can I try the {x} plan?", LENGTHS),
    (PLANS, "Help with the {x} plan. Our team for members of the {x} plan has its desk in {v}, and answers questions "
     "until six.", "Where is the team of the {x} plan?", PLACES),
    (PLANS, "Payment day. The fee of the {x} plan is taken from your account on the first {v} of the month. If the "
     "account is empty we try again.", "On which day is the {x} plan paid?", DAYS),
)  # fmt: skip


def faq_line(rng: Random, low: int = 6, high: int = 12) -> dict[str, Any]:
    """One question about `low` to `high` articles, of which no two have the same text and subject."""
    count = rng.randint(low, high)
    articles: dict[tuple[str, str], tuple[str, str]] = {}  # text and subject -> question and answer
    while len(articles) < count:
        subjects, text, question, answers = rng.choice(ARTICLES)
        subject = rng.choice(subjects)
        if (text, subject) not in articles:
            articles[text, subject] = question.format(x=subject), rng.choice(answers)
    chosen = rng.randrange(count)
    prompt, span, asked = "", (0, 0), ""
    for place, ((text, subject), (question, answer)) in enumerate(articles.items()):
        before, after = text.split("{v}")
        prompt += before.format(x=subject)
        if place == chosen:
            span, asked = (len(prompt), len(prompt) + len(answer)), question
        prompt += answer + after.format(x=subject) + "\n"
    answer = prompt[slice(*span)]
    return {"prompt": f"{prompt}Question: {asked}\nAnswer:\n", "answer": answer, "answer_span": list(span)}


def main() -> None:
    """Parse the command line and write the file."""
    parser = argparse.ArgumentParser(description="Write questions to a help centre as JSONL.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--articles", type=int, nargs=2, default=(6, 12), metavar=("LOW", "HIGH"), help="in a prompt")
    parser.add_argument("--no-spans", action="store_true", help="leave `answer_span` out")
    options = parser.parse_args()
    low, high = options.articles
    most = sum(len(subjects) for subjects, *_ in ARTICLES)  # different articles
    if not 1 <= low <= high <= most:
        parser.error(f"--articles {low} {high}: use 1 to {most}, the smaller number first")
    if options.lines < 1:
        parser.error(f"--lines {options.lines}: use 1 or more")
    if not options.path.parent.is_dir():
        parser.error(f"{options.path}: there is no folder {options.path.parent}")
    rng = Random(options.seed)
    with open(options.path, "w", encoding="utf-8") as file:
        for _ in range(options.lines):
            line = faq_line(rng, low, high)
            if options.no_spans:
                del line["answer_span"]
            file.write(json.dumps(line) + "\n")
    print(f"wrote {options.lines} lines to {options.path}")


if __name__ == "__main__":
    main()

"""Seeded tasks with answers and gold positions. Owns: texts, spans, encoding. Must never know: models, training."""

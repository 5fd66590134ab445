"""SHA-256 of the modelling files that earlier versions of this library shipped with exports, by version and file name.

Exports of these versions verify without `trust_remote_code`. If files of `surgery/hybrid/` change after a release, add
that release here (`sha256sum surgery/hybrid/*.py`), or the files that differ from those of a release above it.
"""

from __future__ import annotations

_BEFORE_SERVE = {
    "__init__.py": "24645235b493c0294a87b45af35fff1885e550d85eb6465361f0307611ec779c",
    "attention.py": "53e567b0c27d2fc874201aac6ba595c4c7d20bb797353bf9c19ef42f3b550994",
    "branches.py": "0f38f437d9f426b956edcc74f16b7cd2c45a19a7f6358ea4f0ba2c47f315f42f",
    "causal_lm.py": "9361f4dc7d5a5773b9a12e713be5ee0ca0a7f9a054bcdf651acf6af2fd1087e1",
    "configuration.py": "982e47bf34f25b39aef341fa35c2b2ff1144075b2ff3d3d58d6c817cd711b4d1",
    "discrete_scan.py": "0d7463dba821de7383b49546e56b57f870c014e937bb43a6d1b5485c3a2b9b80",
    "donor.py": "34677cfc82ee2bde26b300210f722f1014530e7660e5829c6528cb7ed3faa3bd",
    "mixer.py": "0a1a783cc651aac5dfe5ae352cdd9fd32ad5c986896c681c05d68b8c4df462e0",
    "model.py": "d9c0f58a1ede205e593058754b24524600c3b808652bc036fd00797055f0d08b",
    "modeling_bamba_hybrid.py": "c533311817a7375add108b120656bcc74f73ec97adb77877dfa83cc9218a3481",
    "modeling_falcon_mamba_hybrid.py": "d5c1015bb47eec31e9c7a8bc92e320ba5161a2eb5db3f02f45705e965f48b6c7",
    "modeling_granite_hybrid.py": "60d2dbef38fd2a1ac0ca8c74619478874012577a88a0cbfdb2b9b99aaa1c9314",
    "modeling_llamba.py": "dcba7892075ee5929f11544b952d1840832620063f564d9b3760f22a5bc5ce93",
    "modeling_mamba2_hybrid.py": "33d1804676f7b6fe5c6e93921f1051ed127339e947ab93467feffccf56e3ea54",
    "modeling_mamba2attn.py": "4dbba6b5a68ca30c48e1644429a11abad58d7fb0eee411fc3c3fc9dfe2a1aab5",
    "modeling_mamba_hybrid.py": "63c9ca9bb4841eb9a201968a3c8396bc69882afa68e14c1102370e8427b50fd1",
    "modeling_nemotron_h_hybrid.py": "abd151e904ef3973e9d171161fce2b295a3d1674aa5e458a7503ccb8aaf5a80d",
    "modeling_zamba2_hybrid.py": "d49b940556c4379d21b91323a63fe70948d4f0c3ccdce7e5b5828190315e5660",
    "packing.py": "fa869eca2a61eeba823166a6613550b053157d6cab5cc6002130dfbcf11349c3",
    "shipping.py": "144ec620bec121b8c5a20cf9e06c1a18d59a8e44c2a01b9460cc73b1bf56d3c8",
    "sites.py": "7fe352d2f484a6af5b809bcc455a2b87f2c52df7ee4800b76217d6c0034d01d9",
    "splice_pass.py": "c48f55ca2551eab94f22dadcc415c37c73156f6c945e7bf262f2d96cd112d1a2",
    "streams.py": "c9ca952e50646011317b649c87401ceda33e3097b476126d9b75633f1b2d4981",
}

EARLIER: dict[str, dict[str, str]] = {
    "0.1.0": {
        "attention.py": "2e50220d9615f466073bc1bbe62171a74bf6711f81a42ef0b6851de7e84a5b44",
        "discrete_scan.py": "925d4e9b5ad221ffc8caaede883bebcf4dc0c67d2407818d971b986b700f71e7",
        "donor.py": "9adfb506ae8a86a05a33c12a53101eadd7acf03969eb5badb6f4f6fcd59db3e1",
        "mixins.py": "c18f9bb095c13e3a67d463c2099d4832ecca8578a3e2645541df4271a8387034",
        "modeling_bamba_hybrid.py": "163d65963296079735ea37887b91582171fd2ce865f521c6f2e19efa5b2b55c8",
        "modeling_falcon_mamba_hybrid.py": "1335856c0c33b0675756da82b3f4c1f4ca6947275449de77a34433b0ff858d56",
        "modeling_granite_hybrid.py": "4da5a5e045c1f47892cd93a7cfc0e38cfcefa76b55e3bf165eb9705ccb0f7ab6",
        "modeling_llamba.py": "15e3448ec32e92f5145e3307dfe43cea1c33ccc5b88020d4f567e17d9e712a11",
        "modeling_mamba2_hybrid.py": "b4549411326afc1e09a7fba9ba0709bac0811fdeb8cbaf4173633c98cddce7d0",
        "modeling_mamba2attn.py": "5cc04cbb5f632b0b0d532504347c803f18a7d49a961eda44205971e0cf9cf540",
        "modeling_mamba_hybrid.py": "4f9d8c5190a684eb7a1574ee915941e7d162e05d0d9670571bc21e88c271f744",
        "modeling_nemotron_h_hybrid.py": "031aaef6c91444ab654ef72f7b1f4dbb75608e594046d4613fd46f02e40ac292",
        "modeling_zamba2_hybrid.py": "8adff9fa426e1f6d5b9725423753bc6182a4a4517314528891b87bb44c2a0818",
        "packing.py": "c064443263c61f50e403f31864fce6cf606dd666115e72463af8349c3a074ed6",
        "sites.py": "9bf20e863c7d11045f53910daf3a14f4d5ce15102879d032574c5492361196e6",
    },
    "0.2.0.dev0, before splice.min_width": {
        **_BEFORE_SERVE,
        "attention.py": "548c14c6486413a48c72d900ac72c632e4b5f15a47e4f0a5f0e56a8c383738c8",
        "sites.py": "3b9fdf1bcc137f21c2b267017066e75591722bd340baa091801c6b2aabebb8b9",
        "streams.py": "3bc0ebbc41942bbd54fe0cff1ceb8968393a620bebd23658ef42800040495bf0",
    },
    "0.2.0.dev0, before `transformers serve`": _BEFORE_SERVE,
    "0.2.0.dev0, before padding without biases": {
        **_BEFORE_SERVE,
        "shipping.py": "4dd64fb756d270552814aea5aea3bc39185f15b4b0c37eab77b182b31e843d49",
    },
    "0.2.0.dev0, before transformers 5.24": {
        **_BEFORE_SERVE,
        "attention.py": "3a1ac5c3d2e61edd32294bf63a96d8e54bfd3039effea9c923a922d45fbb7c3e",
        "donor.py": "3ee846f8623bda5c90014b1124b8685ed7b8a62b6b7c7305d82464c42f5fad23",
        "modeling_llamba.py": "c5218d8dd4ece1b39e66bcd16975a0767aa25e4d30a5cec8207089e095f830df",
        "modeling_mamba2attn.py": "cd2a4f584e398dd2fd67b6188b73a727299b1a8cdd562a98759324ef81ac971f",
        "packing.py": "5f2a4825218ee0f503e9062dbde7fa21b6fc1f2afe7b90390b95f2b3fd9bc383",
        "shipping.py": "4dd64fb756d270552814aea5aea3bc39185f15b4b0c37eab77b182b31e843d49",
        "streams.py": "760a63e4a7f68d0c027bb88d689a7925d04a79636354d61f7d294fd7a66b874c",
    },
}

"""SHA-256 of the modelling files that earlier versions of this library shipped with exports, by version and file name.

Exports of these versions verify without `trust_remote_code`. If files of `surgery/hybrid/` change after a release, add
that release here (`sha256sum surgery/hybrid/*.py`).
"""

from __future__ import annotations

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
}

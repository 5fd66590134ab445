"""Load pretrained models: checkpoint formats, the registry of families, how heads lie in weights, sizes."""

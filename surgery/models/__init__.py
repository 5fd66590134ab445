"""Load pretrained models: checkpoint formats, model families, the layout of heads in weights, and sizes."""

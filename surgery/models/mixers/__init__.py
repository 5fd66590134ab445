"""How the heads of each kind of mixer lie in its weights, and how each computes hidden attention."""

"""Layout of heads in the weights of each kind of mixer, and its hidden attention."""

"""The documents that training and evaluation read: generated ones, and the user's own."""

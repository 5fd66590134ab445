"""Write files and folders whole or not at all, and decide which may be replaced."""

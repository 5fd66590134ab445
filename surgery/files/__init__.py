"""Write files and folders atomically, lock them, and search them for secrets."""

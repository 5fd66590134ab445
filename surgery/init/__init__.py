"""Write a recipe for a model: measure the numbers that a recipe needs, and give the reason of each as a comment."""

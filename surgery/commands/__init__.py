"""Commands besides those that run a recipe, and the arguments that several commands share."""

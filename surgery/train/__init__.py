"""Training: `training` runs the stages, `trainer` the steps of one, `micro_batches` and `targets` what is in a step."""

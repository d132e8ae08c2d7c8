"""Copies of the state that saves take while the training goes on."""

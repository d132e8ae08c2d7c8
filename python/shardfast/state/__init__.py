"""The user's state as leaves, values and regions, and which saved leaf fills what of it."""

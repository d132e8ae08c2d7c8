"""Training loops of frameworks that save and load with Shardfast: one file each, on top of its public words."""

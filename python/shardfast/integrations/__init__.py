"""Training loops of frameworks that save and load with Shardfast, on top of its public words."""

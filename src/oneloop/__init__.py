"""oneloop: reinforcement-learning post-training of language models, one loop, every stage a small replaceable part."""

__version__ = "0.1.0.dev0"

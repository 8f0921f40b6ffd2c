"""The engine: method-blind. Models, packed training, sampling, the sandbox."""

import os

# Threads that wait for the next parallel region spin for a moment, then sleep. Sleeping at once makes decoding 2.4 times slower, and
# spinning for long makes every process crawl where the cores are shared. Read by libgomp when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

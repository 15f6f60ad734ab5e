"""Which experts stay on the device: decided here for the runtime and for its simulation alike.

numpy only. `table.py` decides, `policies.py` and `lfru.py` say what an expert is worth, `trace.py`
reads what `--trace` recorded, `simulate.py` replays it, `belady.py` knows the best there was.
"""

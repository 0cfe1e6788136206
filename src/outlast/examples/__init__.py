"""Examples that run: `gpt.py` and `digits.py`, each beside its plain-PyTorch twin `*_plain.py`, `fsdp_gpt.py`,
`pipeline_gpt.py`, `gpt_precision.py`, `lightning_digits.py` and `stream_gpt.py`.

Read `gpt_plain.py` and `gpt.py` side by side (`diff`): some ten lines differ. What both share is in `models.py`
(networks and losses), `data.py` (corpora that ship with Python and scikit-learn: nothing is downloaded), `_script.py`
(options and the result file) and `_fingerprint.py`. Nothing here is imported by outlast's own rooms.
"""

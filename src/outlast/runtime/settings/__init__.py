"""What a run was told: checkpoint settings, settings for heads, versions, ordered fault points. Floor 1, no torch.

Must never start anything or know another room. Read `save_settings.py` first.
"""

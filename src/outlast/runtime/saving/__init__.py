"""One replica's part in checkpoints: what a save holds, what a run begins with, what became of a save. Floor 6.

Must never publish what the coordinator has not released. Read `member_saves.py`, then `resume.py`.
"""

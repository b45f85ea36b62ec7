"""A device that heats up, in virtual time: what `switchgear simulate` runs policies against."""

"""Settings of hypothesis: a deadline would be a timed test, and machines are noisy."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

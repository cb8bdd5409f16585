"""For every test: a loaded machine is no failure of a property."""

from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

"""Every test is checked for what it leaves behind; see `support/leaks.py`."""

from hypothesis import settings

pytest_plugins = ["support.leaks", "pytester"]

# No test asserts a speed, and none writes into the checkout.
settings.register_profile("omnibus", deadline=None, database=None)
settings.load_profile("omnibus")

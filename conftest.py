"""Set what every property test shares: the examples, and that none fails because the machine was busy.

``house`` draws the same examples every time, so that a change is judged by the change. ``campaign`` draws new ones:
``make laws`` runs the property tests ten times with it.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("campaign", deadline=None, print_blob=True)
settings.load_profile("house")

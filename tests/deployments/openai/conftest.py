"""Lets the tests of this folder import the helpers beside it (`fake_dispatcher`)."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parents[1]))

# Examples may be slow on a busy machine; that says nothing about the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

"""The stand-ins are beside the tests, not in the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

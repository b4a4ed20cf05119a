"""Tests import the seven files from the repository's root, wherever they are started."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

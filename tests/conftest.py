"""Tests import the seven files from the repository's root, and send themselves and others signals."""
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and all that it starts, would ignore Ctrl-C

"""Set up what all tests need.

The seven files are imported from the repository's root, whatever the current folder is. Without a
GPU, Triton's kernels run in its interpreter, which the environment has to request before the first
import of sample.py.
"""

import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

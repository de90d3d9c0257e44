"""With this folder on PYTHONPATH, SGLang starts on a CPU, also in the processes that it makes itself: torchvision's builds on the
package index need CUDA, and its CPU backend imports names of vLLM. Both are stand-ins that nothing calls.
"""

import importlib.util
from pathlib import Path

_found = importlib.util.spec_from_file_location("_torchvision", Path(__file__).parent.parent / "torchvision.py")
assert _found is not None and _found.loader is not None
_torchvision = importlib.util.module_from_spec(_found)
_found.loader.exec_module(_torchvision)
_torchvision.install()

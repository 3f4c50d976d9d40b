"""What parallel_lce.verl needs of verl 0.9.1, of the same contract, in few lines."""

import importlib
import importlib.metadata
import os

for _name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_name)
for _plugin in importlib.metadata.entry_points(group="verl.plugins"):
    _plugin.load()

"""Trainings of stock Megatron-core's GPT with either loss. Not part of the package."""

import warnings

# Importing Megatron-core warns of every optional package that is missing, and of names that torch 2.13 has renamed.
# Those lines would hide the results. The filters are here since they must be set before Megatron-core is imported.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)

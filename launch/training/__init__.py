"""The training program behind demo.sh and train.sh: stock Megatron-core, with either loss. Not part of the package."""

"""Other engines, measured in turn with ours: one file each, imported only when asked for."""

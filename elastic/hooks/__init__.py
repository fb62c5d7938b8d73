"""Every place where torch is patched or called back by it."""

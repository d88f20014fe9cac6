"""Settings, each said once: `setting` says what one is, `table` holds all of them."""

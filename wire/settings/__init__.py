"""Settings, each defined once: `setting` defines the form of one, `table` holds all of them."""

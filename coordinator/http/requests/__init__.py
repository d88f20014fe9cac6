"""From the fields of a body to a plan that can be run: types, rules, grammars, token ids."""

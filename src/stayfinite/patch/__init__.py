"""From an incident to changes of the user's source that may cure it."""

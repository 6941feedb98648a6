"""From a request to the tokens its engine will see."""

"""The decisions of hotswap as pure functions and state machines: no clock, socket, thread, random or torch in here."""

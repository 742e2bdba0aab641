"""The HTTP edge: who calls, which session, is it valid; asks for a place, sends the body there, streams back."""

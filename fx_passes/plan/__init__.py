"""Where everything lies: buffers in one arena, weights prepacked, calls in order."""

"""Two traces compared: steps aligned, judged by bounds, differences kept."""

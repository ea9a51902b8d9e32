"""Two traces held against each other: steps aligned, judged by bounds, differences kept."""

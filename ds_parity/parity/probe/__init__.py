"""With what coefficient did each micro-batch enter a step?"""

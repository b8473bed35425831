WORD = "above"

"""What prompts.py puts together: templates, whose slots prompt_words.py fills, and functions to be completed."""

from __future__ import annotations

TEMPLATES: dict[str, list[str]] = {
    "write": [
        "Write a {tone} {form} about {topic}.",
        "Write a {tone} {form} for {person} about {event}.",
        "Compose a {tone} email to {person} regarding {event}. Keep it under {m} words.",
        "Describe {place} in a {tone} paragraph with sounds, smells and colours.",
        "Write the opening paragraph of a story that is set in {place} and begins with {event}.",
        "Write a {form} in which {name} and {name2} talk about {topic}.",
        "Draft a {tone} announcement of {event}.",
        "Rewrite this sentence so that it sounds {tone}: {name} was late because of {event}.",
        "Imagine you are in {place}. Write a {tone} {form} about your day there.",
    ],
    "explain": [
        "Explain {topic} to {person}.",
        "What is {topic}, and why does it matter?",
        "How does {topic} work?",
        "What are the advantages and disadvantages of {topic}?",
        "Compare {topic} and {topic2}.",
        "Give me a short introduction to {topic} with an example.",
        "Describe the history of {topic} in a few sentences.",
        "What are the most common misconceptions about {topic}?",
        "Explain the connection between {topic} and {topic2}.",
    ],
    "advise": [
        "{problem}. What should I do?",
        "Can you help me? {problem}.",
        "{problem}. Give me {n} practical tips.",
        "How can I get better at {topic}?",
        "Plan a weekend in {place} for {person}.",
        "What should I look for when I buy a {thing}?",
        "How do I clean and maintain a {thing}?",
        "Suggest a gift for {person} who likes {topic}.",
    ],
    "facts": [
        "What is the capital of {country}?",
        "Who invented {invention}?",
        "When was {invention} invented and by whom?",
        "Who created {work}, and what is it about?",
        "What language do they speak in {country}?",
        "Where does the {animal} live and what does it eat?",
        "How long does a {animal} live?",
        "What is {country} famous for?",
        "Which countries share a border with {country}?",
        "Tell me {n} interesting facts about the {animal}.",
        "What is the currency of {country}?",
        "Who is the main character in {work}?",
        "What are traditional dishes of {country}?",
    ],
    "play": [
        "You are {role}. Tell me about {topic}.",
        "Pretend to be {role} and describe {place}.",
        "As {role}, give advice to someone who says: {problem}.",
        "Answer as {role} would: what do you think of {topic}?",
        "Let us play a game: you are {role}, I am {role2}. You begin.",
    ],
    "list": [
        "List {n} ideas for {event}.",
        "Give {n} reasons why {topic} is important.",
        "Make a shopping list for {event}.",
        "Name {n} books or films that deal with {topic}.",
        "Create a table of {n} countries with their capitals and languages, including {country} and {country2}.",
        "Give me {n} creative names for a shop in {place} that sells {goods}.",
        "Make a timeline of the history of {topic}.",
        "Extract all names and places from this text: {name} met {name2} in {place}, then both went to "
        "{country} to study "
        "{topic}.",
    ],
    "think": [
        "Is {topic} more useful than {topic2}? Argue for both sides.",
        "What would happen if there were no {topic}?",
        "{name} is older than {name2}, and {name2} is older than {name3}. Who is the youngest? Explain.",
        "Classify each of these as an animal, a place or a person: {animal}, {country}, {name}.",
        "Which of these does not belong with the others: {animal}, {animal2}, {goods}? Why?",
        "If all {goods} are useful and some useful things are expensive, are all {goods} expensive?",
        "Propose an experiment that shows how {topic} works.",
    ],
    "translate": [
        "Translate <language> to English: ",
        "Translate <language> to English: ",
        "Translate this sentence into English: ",
        "What does this <language> sentence mean in English? ",
    ],
    "summarize": [
        "Summarize: ",
        "Summarize: ",
        "Summarize the following text in {n} sentences: ",
        "Give the main points of this passage: ",
        "Write a short summary of this text: ",
    ],
    "ask": [
        "Who is mentioned in the passage above, and what do they do?",
        "Based on the passage above, answer: what happens, and why?",
        "Where does this take place, according to the text?",
        "What is the main idea of the text above? Answer in {n} sentences.",
        "Use the text above to answer the question: what does the main person want?",
        "Answer from the passage only: how does it end?",
        "What do we learn about {topic} from the text above? If it says nothing, say so.",
        "Which facts in the text above would you check, and how?",
    ],
    "further_chat": [
        "Make it shorter.",
        "Rewrite it in a {tone} tone.",
        "Now write it as a {form}.",
        "Give me {n} examples.",
        "Can you explain that to a ten-year-old child?",
        "What would {role} say about this?",
        "Summarize your answer in one sentence.",
        "Which of these points matters most, and why?",
        "Put your answer into a table.",
        "And what about {topic}? How is it related?",
        "Write the same for {person}.",
        "Are you sure? Check your answer again.",
        "Turn your answer into a list of {n} steps.",
        "What did you leave out?",
    ],
    "further_maths": [
        "Check your answer by solving it in another way.",
        "What is the answer if every number is doubled?",
        "Explain each step in more detail.",
        "Write the solution as one formula.",
        "Now ask me a similar question with other numbers, and solve it.",
        "Give me the final number only.",
    ],
    "further_code": [
        "Write tests for it.",
        "Add comments and type hints.",
        "Translate it into {language}.",
        "What is its time complexity? Can it be made faster?",
        "Rewrite it without loops.",
        "Handle invalid input with clear errors.",
        "Explain it line by line.",
        "Now write a function that {task}.",
    ],
    "story_sums": [
        "{name} has {m} {goods}. {name} gives {n} to each of {n2} friends and then buys {n3} more. How many "
        "{goods} does "
        "{name} have now?",
        "A {job} packs {goods} into {container}. Each holds {n} {goods}, and there are {m} {container}. If "
        "{n2} of the "
        "{container} are sold, how many {goods} are left?",
        "{name} bought {n} {goods} for ${price} each and {n2} {goods2} for ${price2} each. How much change "
        "does {name} get "
        "from ${m}00?",
        "On Monday {name} sold {m} {goods}, on Tuesday {n} more than on Monday, and on Wednesday half as "
        "many as on Monday. "
        "How many {goods} did {name} sell in the three days?",
        "{name} is {n} years older than {name2}, and {name2} is {n2} times as old as {name3}, who is {n3}. "
        "How old is {name}?",
        "There are {m} {goods} in a shop. {percent}% of them are sold in the morning and {n} in the "
        "afternoon. How many are "
        "left?",
        "{name} collected {m} {goods}, {name2} collected {n} times as many, and together they gave away "
        "{m2}. How many are "
        "left?",
        "A class of {m} students is split into groups of {n}. How many full groups are there, and how many "
        "students are left "
        "over?",
        "{name} wants to buy a {thing} for ${m}. {name} has saved ${price} a week for {n} weeks. How much "
        "more money is "
        "needed?",
    ],
    "story_rates": [
        "A {job} earns ${price} an hour and works {n} hours a day, {n2} days a week. How much does the {job} "
        "earn in {n3} "
        "weeks?",
        "A train travels at {m} km per hour for {n} hours and then at {m2} km per hour for {n2} hours. How "
        "far does it go?",
        "A recipe for {n} people needs {m} grams of flour. How much flour is needed for {n2} people?",
        "A {thing} costs ${m}. It is reduced by {percent}%, and then another ${n} is taken off. What is the "
        "final price?",
        "{name} reads {n} pages in {n2} minutes. How many pages does {name} read in {n3} hours?",
        "A tank holds {m} litres. Water flows in at {n} litres a minute and out at {n2} litres a minute. "
        "Describe what happens "
        "and when it is full.",
        "{name} runs {n} km every weekday and {n2} km on Saturday. How many km is that in {n3} weeks?",
        "A {job} needs {n} hours to finish a {thing}. How many can {n2} of them finish in {n3} days of 8 hours?",
        "The price of {goods} rose by {percent}% from ${price}. {name} buys {n} of them. How much more does "
        "{name} pay than "
        "before?",
    ],
    "sums": [
        "What is {m} + {m2} - {n}?",
        "Calculate {m} * {n}.",
        "What is {percent}% of {m}?",
        "Solve for x: {n}x + {n2} = {m}.",
        "What is the average of {m}, {m2}, {m3} and {n}?",
        "A rectangle is {m} cm long and {n} cm wide. What are its area and perimeter?",
        "Write {m}/{m2} as a decimal and explain the steps.",
        "What is the greatest common divisor of {m} and {m2}?",
        "Find the next three numbers of the sequence that starts at {n} and always adds {n2}.",
        "A triangle has sides of {n}, {n2} and {n3} cm. Can it exist? Explain.",
    ],
    "program": [
        "Write a {language} function that {task}.",
        "Write a {language} function that {task}, and explain how it works.",
        "How do I write a program in {language} that {task}?",
        "Write {language} code that {task}. Include an example of how to call it.",
        "Implement a {language} function that {task}. Handle empty input.",
        "Write unit tests for a {language} function that {task}.",
        "Show two ways to write a {language} function that {task}.",
        "Write a {language} class for a {thing} shop with methods to add, remove and list items.",
    ],
    "explain_code": [
        "Explain {concept} in {language} with an example.",
        "What is {concept}? Show a short {language} example.",
        "When should I use {concept}, and when not?",
        "What is the difference between {concept} and {concept2}?",
        "My {language} program that {task} is slow. How can I make it faster?",
        "Give me {n} exercises for practising {concept} in {language}.",
    ],
    "complete": [
        "<code>",
        "<code>",
        "Complete this function:\n\n<code>",
        "Complete the following Python code. Answer with the whole function.\n```python\n<code>```",
    ],
}

#: (name, arguments, returns, docstring) of functions to be completed.
FUNCTIONS: list[tuple[str, str, str, str]] = [
    ("count_words", "text: str", "int", "Return how many words the text has.\n    >>> count_words('a b c')\n    3"),
    ("add_lists", "a: list[int], b: list[int]", "list[int]", "Add two lists of equal length, element by element."),
    ("mean", "values: list[float]", "float", "Return the mean of the values, 0.0 for an empty list."),
    ("only_even", "values: list[int]", "list[int]", "Keep the even values.\n    >>> only_even([1, 2, 4])\n    [2, 4]"),
    ("clamp_all", "values: list[int], low: int, high: int", "list[int]", "Limit every value to low .. high."),
    ("initials", "name: str", "str", "Return the initials of a full name.\n    >>> initials('Ada King')\n    'AK'"),
    ("to_celsius", "fahrenheit: float", "float", "Convert a temperature from Fahrenheit to Celsius."),
    ("count_letters", "text: str", "dict[str, int]", "Count how often each letter occurs, ignoring case."),
    ("longest_word", "words: list[str]", "str", "Return the longest word; the first one of several."),
    (
        "is_sorted",
        "values: list[int]",
        "bool",
        "Whether the values never fall.\n    >>> is_sorted([1, 1, 3])\n    True",
    ),
    ("running_total", "values: list[int]", "list[int]", "Return the sums of all beginnings of the list."),
    ("chunks", "values: list[int], size: int", "list[list[int]]", "Cut a list into pieces of at most `size` values."),
    ("invert", "table: dict[str, int]", "dict[int, str]", "Swap the keys and values of a dictionary."),
    ("digits", "number: int", "list[int]", "Return the decimal digits of a positive number, the highest first."),
    ("dot", "a: list[float], b: list[float]", "float", "Return the dot product of two vectors."),
    ("dedupe", "values: list[str]", "list[str]", "Remove repeated values and keep the order of the first ones."),
    (
        "parse_pairs",
        "text: str",
        "dict[str, str]",
        "Parse 'a=1;b=2' into a dictionary.\n    >>> parse_pairs('a=1')\n    {'a': '1'}",
    ),
    ("next_prime", "number: int", "int", "Return the smallest prime above the number."),
    ("power_of_two", "number: int", "bool", "Whether a positive number is a power of two."),
    ("swap_case", "text: str", "str", "Turn small letters into capitals and the other way round."),
    ("common", "a: list[int], b: list[int]", "list[int]", "Return the values that both lists hold, ascending."),
    ("diagonal", "matrix: list[list[int]]", "list[int]", "Return the main diagonal of a square matrix."),
    ("word_lengths", "text: str", "list[int]", "Return the length of every word of the text."),
    ("remove_at", "values: list[int], index: int", "list[int]", "Return the list without the value at the index."),
    ("to_roman", "number: int", "str", "Write a number from 1 to 39 in Roman numerals.\n    >>> to_roman(4)\n    'IV'"),
    ("hamming", "a: str, b: str", "int", "Count the places at which two strings of equal length differ."),
    ("compress", "text: str", "str", "Run-length encode a text.\n    >>> compress('aab')\n    'a2b1'"),
    ("min_max", "values: list[int]", "tuple[int, int]", "Return the smallest and the largest value."),
    ("merge_counts", "a: dict[str, int], b: dict[str, int]", "dict[str, int]", "Add the counts of two tables."),
    ("is_leap", "year: int", "bool", "Whether a year of the Gregorian calendar has 366 days."),
    ("wrap", "text: str, width: int", "list[str]", "Break a text into lines of at most `width` characters at spaces."),
    ("triangle_area", "a: float, b: float, c: float", "float", "Return the area of a triangle from its three sides."),
    ("collatz", "number: int", "list[int]", "Return the Collatz sequence from the number down to 1."),
    (
        "pairs_with_sum",
        "values: list[int], total: int",
        "list[tuple[int, int]]",
        "Return all pairs that add up to total.",
    ),
    ("title_case", "text: str", "str", "Capitalise every word except 'a', 'an', 'the', 'of' and 'and'."),
    (
        "moving_average",
        "values: list[float], width: int",
        "list[float]",
        "Return the means of all windows of the width.",
    ),
]

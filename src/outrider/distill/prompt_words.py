"""What fills the slots of the templates that prompts are made of: words and numbers, by slot."""

from __future__ import annotations

_TEXTS = {
    "topic": """
        photosynthesis; the water cycle; plate tectonics; gravity; black holes; the immune system; vaccines;
        antibiotics; DNA; evolution; climate change; solar power; wind turbines; nuclear energy; electric cars;
        batteries; the internet; encryption; search engines; machine learning; neural networks; robots; 3D
        printing; satellites; rockets; the moon; Mars; comets; tides; volcanoes; earthquakes; hurricanes;
        rainbows; coral reefs; rainforests; deserts; glaciers; whales; honey bees; ants; penguins; elephants;
        migration of birds; dinosaurs; fossils; ancient Egypt; the Roman Empire; the Silk Road; the Renaissance;
        the printing press; the French Revolution; the Industrial Revolution; the Cold War; the United Nations;
        democracy; inflation; interest rates; the stock market; insurance; taxes; supply and demand;
        international trade; marketing; time management; public speaking; negotiation; teamwork; leadership;
        remote work; job interviews; meditation; sleep; exercise; a balanced diet; vitamins; dehydration; first
        aid; stress; friendship; kindness; honesty; courage; jazz; classical music; the piano; photography;
        painting; poetry; theatre; cinema; chess; football; marathon running; swimming; cycling; gardening;
        cooking; baking bread; coffee; tea; chocolate; cheese; knitting; woodworking; recycling; public
        transport; bridges; skyscrapers; lighthouses; submarines; airplanes; compasses; calendars; mathematics;
        probability; statistics; geometry; prime numbers; logic; philosophy; ethics; psychology; memory;
        learning languages; dictionaries""",
    "place": """
        Paris; Rome; Kyoto; Cairo; New York; Sydney; Lisbon; Istanbul; Mexico City; Nairobi; Bangkok; Reykjavik;
        Hawaii; Barcelona; Vienna; Prague; a small mountain village; a fishing town; a busy harbour; a quiet
        library; a desert oasis; an old castle; a night market; a train station; a lighthouse on a cliff; a
        space station; a bakery; a farm; a rainy forest; a snowy valley; Buenos Aires; Edinburgh; Marrakesh;
        Singapore; Hanoi; Cape Town""",
    "person": """
        your manager; a customer; a new colleague; your landlord; an old friend; your neighbour; a teacher; a
        student; a doctor; a ten-year-old child; your grandmother; a job applicant; a travel agent; the city
        council; a restaurant owner; a software team; a beginner; a busy parent; a retired engineer; a small
        business owner; a nurse; a tourist""",
    "role": """
        a pirate captain; a medieval knight; a detective; a travel guide; a history teacher; a chef; a personal
        trainer; a librarian; an astronaut; a gardener; a wise old wizard; a news reporter; a career coach; a
        scientist; a sailor; a robot who has just learned to feel; a philosopher; a football coach; a museum
        guide; a time traveller""",
    "thing": """
        bicycle; laptop; phone; backpack; coffee machine; garden; kitchen; tent; camera; guitar; desk;
        houseplant; puppy; cat; car; lamp; umbrella; jacket; notebook; bookshelf; aquarium; drone; keyboard;
        sofa; wardrobe; window; fence""",
    "tone": """
        short; friendly; formal; persuasive; funny; polite; professional; heartfelt; concise; enthusiastic;
        calm; poetic""",
    "form": """
        email; letter; poem; short story; blog post; speech; product description; diary entry; dialogue; review;
        song; newspaper article; haiku; advertisement; thank-you note; invitation; cover letter; social media
        post; fairy tale""",
    "problem": """
        I cannot sleep at night; my internet connection is slow; I want to save money every month; my plants
        keep dying; I feel nervous before presentations; I want to learn a new language; I have a headache after
        work; my neighbour is very loud; I want to start running; I forget names quickly; I have to plan a
        birthday party; I am moving to a new city; I want to eat less sugar; my laptop is overheating; I have a
        job interview tomorrow; I want to read more books; I am always late; I have to cook for eight guests; I
        need a cheap holiday; my dog barks all the time; I want to change my career; I argue with my brother; I
        cannot focus on my studies; I want to write a novel""",
    "event": """
        a product launch; a wedding; a school trip; a charity run; a team meeting; a conference; a birthday
        party; a graduation; a delayed delivery; a cancelled flight; a job promotion; a farewell party; an art
        exhibition; a power cut; a house warming; a quarterly report; a refund; a missed deadline; a job offer;
        a book club""",
    "country": """
        France; Japan; Brazil; Canada; Egypt; India; Australia; Germany; Kenya; Mexico; Norway; Italy; China;
        Spain; Greece; Argentina; Turkey; Thailand; Sweden; Poland; Portugal; Peru; Vietnam; Ireland; Finland;
        Morocco; Indonesia; Chile""",
    "invention": """
        the telephone; the light bulb; the steam engine; the airplane; the telescope; penicillin; the printing
        press; the radio; the computer; the bicycle; the microscope; dynamite; paper; the compass; the World
        Wide Web; the car""",
    "work": """
        Romeo and Juliet; Don Quixote; War and Peace; The Odyssey; Pride and Prejudice; Moby-Dick; Frankenstein;
        Hamlet; The Mona Lisa; The Starry Night; Beethoven's Ninth Symphony; The Lord of the Rings; Sherlock
        Holmes; Alice in Wonderland; The Jungle Book; Les Miserables; The Little Prince; Dracula; The Magic
        Flute; Robinson Crusoe""",
    "animal": """
        dolphin; tiger; octopus; owl; kangaroo; elephant; shark; eagle; frog; spider; wolf; bear; giraffe;
        koala; bat; crocodile; horse; rabbit; hedgehog; penguin; turtle; camel; fox; parrot; lion; seal; beaver;
        bee""",
    "name": """
        Anna; Ben; Clara; David; Emma; Felix; Grace; Henry; Ines; Jack; Karen; Liam; Maria; Noah; Olivia; Peter;
        Quinn; Rosa; Sam; Tina; Umar; Vera; Will; Yasmin; Zoe; Carlos; Priya; Kenji; Fatima; Lars; Mei; Ivan;
        Aisha; Tom; Julia""",
    "goods": """
        apples; oranges; pencils; notebooks; cookies; marbles; stickers; books; eggs; cupcakes; balloons;
        tickets; shirts; flowers; candles; toys; bottles of juice; sandwiches; postcards; seashells; tomatoes;
        chairs; bags of rice; stamps""",
    "container": "boxes; bags; baskets; crates; shelves; jars; packs; drawers; trays; cartons",
    "job": """
        baker; farmer; teacher; painter; carpenter; driver; gardener; tailor; cook; plumber; nurse; builder;
        writer; tutor""",
    "language": "Python; Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; SQL; TypeScript; Bash",
    "task": """
        reverses a string; checks whether a word is a palindrome; counts the vowels in a text; finds the largest
        number in a list; removes duplicates from a list; sorts a list of tuples by the second element; merges
        two sorted lists; computes the factorial of a number; returns the nth Fibonacci number; checks whether a
        number is prime; finds the greatest common divisor of two numbers; converts Celsius to Fahrenheit;
        counts how often each word occurs in a text; finds the second largest number; flattens a nested list;
        rotates a list by k places; checks whether two strings are anagrams; finds the missing number in a
        sequence; transposes a matrix; multiplies two matrices; implements binary search; implements bubble
        sort; implements quicksort; implements a stack; implements a queue with two stacks; reverses a linked
        list; computes the depth of a binary tree; validates balanced brackets; converts a number to binary;
        converts Roman numerals to integers; reads a CSV file and sums a column; writes a dictionary to a JSON
        file; lists the files of a folder; downloads a web page and counts its links; validates an email address
        with a regular expression; generates a random password; groups words by their first letter; finds the
        longest common prefix; computes a moving average; finds all pairs that add up to a target; capitalises
        every word; removes punctuation from a text; calculates the area of a triangle; simulates rolling two
        dice; prints a multiplication table; computes the median of a list; splits a list into chunks; counts
        the days between two dates; implements a simple calculator; caches the results of a function; finds the
        intersection of two sets; checks whether a year is a leap year; encodes a message with a Caesar cipher""",
    "concept": """
        recursion; a hash table; a linked list; a binary tree; object-oriented programming; inheritance; a
        decorator; a generator; list comprehensions; exceptions; unit tests; version control; a REST API; a
        database index; SQL joins; big O notation; dynamic programming; a thread; asynchronous code; a compiler;
        garbage collection; type hints; a lambda function; a closure; the difference between a list and a tuple;
        the difference between == and is; regular expressions; a virtual environment; dependency injection; a
        stack and a queue; pointers; a mutex""",
}
WORDS = {slot: [" ".join(word.split()) for word in text.split(";")] for slot, text in _TEXTS.items()}

NUMBERS: dict[str, list[int]] = {
    "n": list(range(2, 13)),
    "m": [*range(12, 100), *range(100, 400, 5)],
    "price": [2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 45, 60, 75, 80],
    "percent": [5, 10, 15, 20, 25, 30, 40, 50, 60, 75],
}

"""Prompts of many kinds for `pegboard train-eagle`: `python examples/eagle_prompts.py 500 > prompts.txt`.

Each is a task about a subject. The same number gives the same prompts; a larger one begins with them.
"""

from __future__ import annotations

import random
import sys
from itertools import product

THINGS = (
    "bicycles, bread, rain, chess, coffee, whales, trains, gardens, money, sleep, honey, bridges, "
    "volcanoes, maps, clocks, soap, glass, forests, kites, paper, salt, mirrors, rivers, lighthouses, "
    "wool, snow, violins, elevators, cheese, ants, deserts, batteries, magnets, vaccines, tides"
)
TOPICS = (
    "photography, nutrition, electricity, democracy, evolution, recycling, inflation, friendship, "
    "gravity, the printing press, the water cycle, public libraries, the Roman roads, solar power, "
    "plate tectonics, the immune system, jazz, impressionist painting, fermentation, the silk trade, "
    "logic, city planning, supply and demand, encryption, ocean currents, the nervous system, "
    "statistics, negotiation, poetry, the French Revolution, climate, chemistry at home, the human "
    "eye, computer networks, folk tales"
)
PEOPLE = (
    "a nurse, a lighthouse keeper, a baker, a retired pilot, a shy student, a detective, a gardener, "
    "a ship's cook, a young queen, a clockmaker, a village teacher, a robot, an old fisherman, a "
    "painter, a mountain guide, a librarian, a street musician, a beekeeper, an astronaut, a "
    "blacksmith"
)
PLACES = (
    "a harbour town, a desert camp, a night train, an empty museum, a mountain hut, a floating city, "
    "a quiet library, an island, an old theatre, a space station, a market square, a frozen lake"
)
DEEDS = (
    "learn a language, save money, repair a bicycle, plan a week of meals, write a speech, grow "
    "tomatoes, prepare for an interview, calm a crying baby, organize a small library, start running, "
    "clean a kitchen, choose a laptop, teach a child to read, move to another city, brew good tea, "
    "take better photographs, sleep well, remember names, plan a birthday party, read a map, fold a "
    "shirt, write a thank-you note"
)
PROGRAMS = (
    "reverses a string, counts the words of a text, checks whether a number is prime, merges two "
    "dictionaries, removes duplicates from a list, converts Celsius to Fahrenheit, finds the largest "
    "number in a list, sorts names by length, reads a CSV file, computes a factorial, validates an "
    "email address, flattens a nested list, counts vowels, finds anagrams, draws a triangle of stars, "
    "sums the digits of a number, searches a sorted list, rotates a matrix, parses a date, simulates "
    "a coin toss"
)
LANGUAGES = "Python, JavaScript, Java, C, Go, SQL"

TASKS = {
    THINGS: (
        "Write a short story about {}.",
        "What would a world without {} be like?",
        "Write a poem about {}.",
        "List five facts about {}.",
        "Write a speech in praise of {}.",
        "Give three questions about {} for a quiz, with their answers.",
    ),
    TOPICS: (
        "Explain {} in simple words.",
        "What are the main ideas of {}?",
        "Write an introduction to an essay about {}.",
        "Give advantages and disadvantages of {}.",
        "Make a lesson plan about {} for one hour.",
        "Which mistakes do beginners make about {}?",
        "Write a dialogue in which a teacher and a pupil talk about {}.",
        "Summarize the history of {} in five sentences.",
    ),
    PEOPLE: (
        "Describe a day in the life of {}.",
        "You are {}. Introduce yourself to a stranger.",
        "Write a letter from {} to a friend.",
        "Write the first page of a novel about {}.",
        "Act as {} and give me advice for a hard week.",
        "Describe how {} looks, speaks and moves.",
    ),
    PLACES: (
        "Describe {} with all the senses.",
        "Write a scene that takes place in {}.",
        "Write a travel report about {}.",
        "Something strange happens in {}. What is it?",
    ),
    DEEDS: (
        "How do I {}?",
        "Give me a plan to {} in one month.",
        "Write an email to a friend who wants to {}.",
        "What do I need to {}? Answer as a list.",
        "Why is it hard to {}, and what helps?",
    ),
    PROGRAMS: (
        "Write a function that {}.",
        "Write a Python program that {}, and explain it line by line.",
        "Which errors can a program make that {}?",
        "Write tests for a function that {}.",
    ),
}


def words(text: str) -> list[str]:
    return [" ".join(word.split()) for word in text.split(",")]


def sums(chance: random.Random) -> list[str]:
    """Small problems with numbers."""
    problems = []
    for first, second in product(range(3, 43, 4), range(2, 12, 3)):
        price = chance.randrange(2, 30)
        problems += [
            f"A box holds {first} apples. How many apples are in {second} boxes? Explain each step.",
            f"Anna buys {second} books for {price} dollars each and pays with 400. How much is left?",
            f"A train goes {first * 5} kilometres in {second} hours. How fast is it?",
            f"Tom is {first} years old, his sister {second} years younger. How old are both together?",
            f"What is {first} times {price} plus {second}? Show how you get there.",
        ]
    return problems


def facts(chance: random.Random) -> list[str]:
    """Texts to take something from."""
    people, places, things = words(PEOPLE), words(PLACES), words(THINGS)
    texts = []
    for person, place in chance.sample(list(product(people, places)), 70):
        year, thing = chance.randrange(1850, 2020), chance.choice(things)
        text = f"In {year} {person} came to {place} and opened a shop for {thing}."
        texts += [
            f"{text} Which year is named in this text, and who came?",
            f'Write as JSON with the keys year, person, place and goods: "{text}"',
            f'Rewrite this sentence so that it sounds like a newspaper: "{text}"',
        ]
    return texts


def prompts() -> list[str]:
    """All of them, in an order that is drawn once."""
    chance = random.Random(7)
    found = list(dict.fromkeys(sums(chance))) + facts(chance)
    for subjects, tasks in TASKS.items():
        found += [task.format(subject) for task, subject in product(tasks, words(subjects))]
    found += [
        f"Write a function in {language} that {program}."
        for language, program in product(words(LANGUAGES), words(PROGRAMS))
    ]
    chance.shuffle(found)
    return found


if __name__ == "__main__":
    print("\n".join(prompts()[: int(sys.argv[1])]))

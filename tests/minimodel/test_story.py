"""Stories by seed: everybody has notes of their own, and the course's model fills every blank."""
import pytest
import torch

from minimodel import load_pretrained
from minimodel.tasks import meeting, story


def test_a_seed_tells_one_story_and_another_seed_another():
    told = [story.tell(seed) for seed in (*range(200), "anna", "Zoë 17")]
    assert told == [story.tell(seed) for seed in (*range(200), "anna", "Zoë 17")]
    assert len({one.text for one in told}) == len(told)
    assert story.tell(17) == story.tell("17") and story.tell() == story.tell(0)  # a seed may come from the environment, as a string


def test_the_update_changes_one_fact_and_does_not_repeat_the_question():
    for seed in range(300):
        told = story.tell(seed)
        values = meeting.SLOTS[told.slot]
        assert told.before in values and told.answer in values and told.before != told.answer
        assert told.before in told.notes.replace(",", "").split() and told.answer in told.update.rstrip(".").split()
        assert told.question == meeting.question(told.slot) and not told.update.startswith(told.question)
        assert told.text == f"{told.notes} {told.update} {told.question}"
    assert {story.tell(seed).slot for seed in range(30)} == set(story.SLOTS)


def test_the_trained_model_answers_every_story():
    """A check may ask anybody's story: none may hang on the last digit of a logit."""
    model = load_pretrained("meeting")
    for seed in range(60):
        told = story.tell(seed)
        with torch.no_grad():
            p = model(torch.tensor([meeting.encode(told.text)])).logits[0, -1].softmax(-1)
        assert meeting.decode([int(p.argmax())]) == told.answer and p.max() > 0.9


@pytest.mark.bad_input
@pytest.mark.parametrize("seed", [1.5, None, True, b"anna"])
def test_a_seed_is_a_number_or_a_word(seed):
    with pytest.raises(TypeError, match="seed must be a whole number or a string, got "):
        story.tell(seed)


def test_a_name_has_one_story_however_its_accent_is_typed():
    assert story.tell("Zoe\u0308") == story.tell("Zo\u00eb") != story.tell("Zoe")


def test_a_seed_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"seed must be text in UTF-8, got '\\udcff'"):
        story.tell("\udcff")


def test_plain_seeds_keep_their_stories():
    assert story.tell("anna").answer == "5B" and story.tell("bela").answer == "Tuesday"  # docs/teaching.md shows them

// A question that has no answer: `title`, `detail` and `hint` for a person, `status` for programs.

export class Refusal extends Error {
  constructor(problem) {
    super(problem.detail || problem.title);
    this.title = problem.title;
    this.detail = problem.detail;
    this.hint = problem.try;
    this.status = problem.status;
  }
}
